"""Where servers listen: an address of this machine, and ports that are free."""

import ipaddress
import socket
from typing import NamedTuple

from hemiola.runtime.errors import Refused


class Ports(NamedTuple):
    """0 means any free one."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


ANY_PORTS = Ports(0, 0, 0)


def address_of(host: str) -> str:
    """What a name means here, in IPv4: tritonserver 2.51 takes any name for 255.255.255.255."""
    right = "pass --host with an IPv4 address of this machine"
    if not host.strip():
        raise Refused("missing", "host", message="--host is empty", way_out=f"{right}")
    if _is_ipv6(host):
        message = f"--host {host} is an IPv6 address, and hemiola listens on IPv4 only"
        raise Refused("out_of_range", "host", message=message, way_out=f"{right}")
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        with socket.socket() as tried:
            tried.bind((address, 0))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"nothing can listen on {host} ({reason})"
        raise Refused("out_of_range", "host", message=message, way_out=f"{right}") from None
    parsed = ipaddress.IPv4Address(address)
    if parsed.is_multicast or parsed.is_reserved:
        message = f"--host {host} is no address of one machine"
        raise Refused("out_of_range", "host", message=message, way_out=f"{right}")
    return str(parsed)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host.strip("[]"))
    except ValueError:
        return False
    return True


def choose_ports(host: str, wanted: Ports, grpc_host: str | None = None) -> Ports:
    """Free ports, each checked by binding it; refuses one that is taken. grpc_host: if it is another."""
    held: list[socket.socket] = []
    try:
        for name, port in wanted._asdict().items():
            held.append(bind(grpc_host or host if name == "grpc" else host, port, name, listens=True))
        return Ports(*(bound.getsockname()[1] for bound in held))
    finally:
        for bound in held:
            bound.close()


def are_free(host: str, ports: Ports, grpc_host: str | None = None) -> bool:
    try:
        choose_ports(host, ports, grpc_host)
    except Refused:
        return False
    return True


def bind(host: str, port: int, name: str, listens: bool) -> socket.socket:
    """On an `address_of`. Connections are refused as long as it does not listen."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        if listens:
            bound.listen()
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", error)
        is_taken = isinstance(error, OSError)
        right = "a free one" if is_taken else "one of 0 to 65535"
        message = f"{name} port {port} on {host} cannot be used ({reason})"
        way_out = f"pass --{name.lower()}-port with {right}"
        code = "in_use" if is_taken else "out_of_range"
        raise Refused(code, f"{name.lower()}_port", port, message=message, way_out=way_out) from None
    return bound
