"""Rewrite an exported program as one without writes, composite operators, autocast and no_grad regions."""
