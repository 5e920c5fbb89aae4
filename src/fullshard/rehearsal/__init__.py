"""One process trains as one rank of many, over a simulated network: ``fullshard rehearse``."""
