"""An exported detector that answers HTTP requests (``pip install 'lit-fedad[serve]'``)."""
