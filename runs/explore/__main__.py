"""A page in the browser to explore models with: attention on an image or text of yours, σ scaled, and what follows.

make explore                                (python -m runs.explore)
make explore RUN=out/runs/deit_tiny_gka_patch16_224
"""

import ipaddress
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deit_gka.draw import DEFAULT_MODEL
from runs.explore.models import load
from trainkit_gka import extras
from trainkit_gka.cli import Bounds, UserError, run
from trainkit_gka.files import check_named


@dataclass
class ExploreConfig:
    """Serve a page, on this machine alone, to look at what models attend to. Choose an image or type a text, a layer
    and a head; scale the bandwidths and see the model run again. Ctrl-C ends it."""

    run: tuple[Path, ...] = ()
    """Folders of runs: a vision run, a language run, or both. Without one of a kind: the demo's."""
    twin: tuple[Path, ...] = ()
    """Runs of the same shape to show beside them, such as the softmax twin."""
    model: str = DEFAULT_MODEL
    """A timm name: the vision model, with random weights, where there is neither --run nor a demo."""
    demo: Path = Path("out/demo")
    """Where the demo's runs are."""
    host: str = "127.0.0.1"
    """The address to listen on. Any but this machine's own, such as localhost, lets other machines use the page."""
    port: Annotated[int, Bounds(0, 65535)] = 0
    """The port to listen on; 0 = the first free one from 7860."""


def main(config: ExploreConfig) -> None:
    if reason := extras.missing("explore", "gradio"):
        raise UserError(reason)
    if not config.run and config.model == DEFAULT_MODEL:
        check_named(config.demo, ExploreConfig.demo, "the outputs of make demo")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:  # Gradio would try a hundred ports on a host that is not this machine, for minutes
        with socket.create_server((config.host, config.port)) as probe:
            own = ipaddress.ip_address(probe.getsockname()[0]).is_loopback
    except OSError as error:
        place = f"{config.host}, port {config.port}"
        raise UserError(f"cannot listen on {place}: {error.strerror}; choose another --host or --port") from error
    if not own:
        print(f"warning: everybody who can reach {config.host} can use this page", file=sys.stderr)
    models = load(config.run, config.twin, config.demo, config.model)
    for model in (*models.vision, *models.language):
        print(model.about)
    with tempfile.TemporaryDirectory(prefix="gka-explore-") as folder:  # of uploads and pictures
        # Gradio reads these when it is imported. It asks its own page whether it is there: not through a proxy.
        os.environ |= dict(GRADIO_TEMP_DIR=folder, GRADIO_ANALYTICS_ENABLED="False", no_proxy="*", NO_PROXY="*")
        from runs.explore import page, server

        served = page.build(models)
        address = server.serve(served, config.host, config.port, own)
        print(f"open {address} in a browser; Ctrl-C ends it", flush=True)
        try:
            signal.pause()
        finally:
            served.close(verbose=False)


if __name__ == "__main__":
    run(main, ExploreConfig)
