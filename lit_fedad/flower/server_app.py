"""The app that Flower runs at the coordinator: one run over sites. Its configuration names the coordinator's folder."""

from __future__ import annotations

from pathlib import Path

import httpx
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.flower.coordinator import ERROR
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.grid import GridCarrier
from lit_fedad.report.console import Display
from lit_fedad.report.plain_warnings import plain_warnings
from lit_fedad.sites.coordinator import coordinate

app = ServerApp()

nothing = ClientApp()
"""The client app that Flower's own SuperNode would load: it answers nothing. Sites of lit_fedad load no app."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs a federation until its end; if it ends early, writes the cause to `ERROR` in the coordinator's folder."""
    folder = FederationFolder.open(Path(str(context.run_config["folder"])))
    display = Display()
    with plain_warnings(display):
        try:
            carrier = GridCarrier(grid, folder, display)
            coordinate(folder.plan, carrier, present=carrier.present)
        except (UserError, httpx.HTTPError) as error:
            # Flower would print a traceback. The command that started the run reads this file and prints one line.
            cause = folder.advised(str(error))
            if isinstance(error, httpx.HTTPError):
                cause = (
                    f"Flower's SuperLink failed ({first_line(error)}); has the disk of {folder.path} room? What it"
                    f" says: {folder.path / 'superlink.log'}; the same command continues"
                )
            try:
                (folder.path / ERROR).write_text(cause)
            except OSError:  # the disk is full, which the text says
                display.error(cause)
