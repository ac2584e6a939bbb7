"""Rewrite an exported program without in-place writes, composite operators, autocast and no_grad regions."""
