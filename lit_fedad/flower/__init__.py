"""Sites over Flower: identity, TLS, queue and run control are Flower's; what is learnt, and how, is not its business.

Only this package imports flwr (``pip install 'lit-fedad[flower]'``).
"""
