"""Networks, frozen backbones, and the random views and drawn images that networks are trained on."""
