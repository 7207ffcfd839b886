"""Demo: start the server, explain a photo of a cat over gRPC, and write the overlay to out/."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import skimage
from rich.console import Console

import camserve

CHELSEA = Path(skimage.__file__).parent / "data" / "chelsea.png"
OUT = Path("out")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run `camserve-server serve` on a free port inside the block; yield its address once it is warm."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", "from camserve_server.cli import main; main()", "serve", "--address", address]
    process = subprocess.Popen(command)  # noqa: S603 -- our own program
    try:
        wait_until_warm(address, process)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_warm(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server's health is SERVING."""
    with camserve.Client(address, retries=0) as client:
        while process.poll() is None:
            with contextlib.suppress(camserve.Unavailable):
                if client.health() is camserve.Health.SERVING:
                    return
            time.sleep(0.1)
    sys.exit("the server did not start")


def main() -> None:
    """Explain the cat."""
    console = Console()
    with server() as address, camserve.Client(address) as client:
        result = client.explain(CHELSEA)
    for prediction in result.predictions:
        console.print(f"{prediction.probability:6.2f}  {prediction.label}", highlight=False)
    OUT.mkdir(exist_ok=True)
    explanation = result.explanations[0]
    path = explanation.save(OUT / "chelsea.gradcam.jpg")
    console.print(
        f"{explanation.method} on {explanation.layer} for {explanation.target.label}: {path}", highlight=False
    )


if __name__ == "__main__":
    main()
