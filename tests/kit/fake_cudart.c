/* A CUDA runtime of FAKE_GPUS GPUs, for a tritonserver that asks which there are and takes memory on each. */
#include <stdlib.h>
#include <string.h>

enum { PROPERTIES = 1032, MAJOR = 360 }; /* bytes of cudaDeviceProp, and where its compute capability stands */

static int num_gpus(void) { const char *said = getenv("FAKE_GPUS"); return said ? atoi(said) : 0; }
static int take(void **place, size_t bytes) { *place = malloc(bytes); return *place == NULL; }

int cudaGetDeviceCount(int *count) { *count = num_gpus(); return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device >= num_gpus(); }
int cudaGetDeviceProperties_v2(char *found, int device) {
    memset(found, 0, PROPERTIES);
    memcpy(found + MAJOR, &(int){9}, sizeof(int));
    return device >= num_gpus();
}
int cudaDeviceGetPCIBusId(char *name, int size, int device) { strncpy(name, "0000:00:00.0", size); return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cudaDeviceCanAccessPeer(int *can) { *can = 0; return 0; }
int cudaStreamCreate(void **stream) { return take(stream, 1); }
int cudaStreamCreateWithPriority(void **stream) { return take(stream, 1); }
int cudaStreamDestroy(void *stream) { free(stream); return 0; }
int cudaMalloc(void **place, size_t bytes) { return take(place, bytes); }
int cudaHostAlloc(void **place, size_t bytes) { return take(place, bytes); }
int cudaFree(void *place) { free(place); return 0; }
int cudaFreeHost(void *place) { free(place); return 0; }
