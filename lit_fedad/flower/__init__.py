"""Sites over Flower: it provides identities, TLS, the message queue and run control, and knows nothing of the learning.

Only this package imports flwr (``pip install 'lit-fedad[flower]'``).
"""
