"""How far a finished FADngs run's densities depend on the images behind them."""

from __future__ import annotations

from collections.abc import Mapping

from lit_fedad.audits.density_privacy import report_privacy
from lit_fedad.errors import UserError
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.methods.fadngs import FADngsClient


def correlate(run: str, options: Mapping[str, str]) -> None:
    """Recomputes the run's report on privacy; writes ``privacy/dcor.json`` (FADngs, Eq. 18-19, Fig. 9).

    Beside the shared densities stands Gaussian noise of the same width, which knows nothing of the images.

    Args:
        run: MLflow run id, or the run's folder.
        options: Values that differ on this machine, such as ``data.root``.

    Raises:
        UserError: If there is no such complete run, or its method shares no densities.
    """
    again = reopen(run, options)
    client = again.federation.client
    if not isinstance(client, FADngsClient) or not client.share_densities:
        raise UserError(
            f"attack=dcor: method {again.result['method']} shares no densities, and no image stands behind what it"
            " shares as a pair; attack=inversion and attack=lira ask what that gives away"
        )
    found = report_privacy(again.federation, again.data, again.fabric, again.folder.path / "figures")
    if found is None:
        raise UserError(
            f"attack=dcor: fewer than 4 training images stand behind densities of {again.folder.path}"
        )
    path = RunFolder(again.folder.path / "privacy").save_json("dcor.json", found)
    again.display.table(
        [
            {
                "raw images and": name,
                "R^2": f"{found[f'{key}_raw_r_squared']:.3f}",
                "R": f"{found[f'{key}_raw_r']:.3f}",
                "R^2, bias-corrected": f"{found[f'{key}_raw_corrected']:.3f}",
            }
            for key, name in (("shared", "shared densities"), ("noise", "Gaussian noise"))
        ]
    )
    again.display.where_next([("numbers", str(path))])
