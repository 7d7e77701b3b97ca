"""The operator's page (``pip install 'lit-fedad[ui]'``): it reads a run's folder, and writes thresholds there."""
