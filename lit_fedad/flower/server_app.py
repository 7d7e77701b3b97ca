"""The app that Flower runs at the coordinator: one run over sites, whose folder its configuration names."""

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
from lit_fedad.report.console import Display, plain_warnings
from lit_fedad.sites.coordinator import coordinate

app = ServerApp()

nothing = ClientApp()
"""What a stock SuperNode would load: it answers nothing. Sites of lit_fedad load no app."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs a federation until its end; what ends it early is left in its folder."""
    folder = FederationFolder.open(Path(str(context.run_config["folder"])))
    display = Display()
    with plain_warnings(display):
        try:
            carrier = GridCarrier(grid, folder, display)
            coordinate(folder.plan, carrier, present=carrier.present)
        except (UserError, httpx.HTTPError) as error:
            # Flower would print a traceback; the command that started the run reads this, and says it in one line.
            told = folder.advised(str(error))
            if isinstance(error, httpx.HTTPError):
                told = (
                    f"Flower's SuperLink failed ({first_line(error)}); has the disk of {folder.path} room? What it"
                    f" says: {folder.path / 'superlink.log'}; the same command continues"
                )
            try:
                (folder.path / ERROR).write_text(told)
            except OSError:  # a full disk, of which the text tells
                display.error(told)
