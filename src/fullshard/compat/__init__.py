"""What frameworks and torch look for by name: :mod:`names` on models, :mod:`patch` in torch's modules."""
