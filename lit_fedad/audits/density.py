"""Measures how far a finished FADngs run's densities depend on the images behind them."""

from __future__ import annotations

from lit_fedad.audits.density_privacy import report_privacy
from lit_fedad.errors import UserError
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.methods.fadngs import FADngsClient


def correlate(run: FinishedRun) -> None:
    """Recomputes the run's distance correlations; writes ``privacy/dcor.json`` (FADngs, Fig. 9).

    The shared densities are compared with Gaussian noise of the same width, which does not depend on the images.

    Args:
        run: Of a method that shares densities.

    Raises:
        UserError: If its method shares no densities, or fewer than 4 training images are behind one.
    """
    client = run.federation.client
    if not isinstance(client, FADngsClient) or not client.share_densities:
        raise UserError(
            f"attack=dcor: method {run.result['method']} shares no densities, so nothing it shares can be paired with"
            " images; attack=inversion and attack=lira measure what it reveals"
        )
    found = report_privacy(run.federation, run.data, run.fabric, run.folder.path / "figures")
    if found is None:
        raise UserError(
            f"attack=dcor: fewer than 4 training images stand behind densities of {run.folder.path}"
        )
    path = RunFolder(run.folder.path / "privacy").save_json("dcor.json", found)
    run.display.table(
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
    run.display.where_next([("numbers", str(path))])
