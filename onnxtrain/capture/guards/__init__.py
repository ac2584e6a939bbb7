"""The conditions on sizes and tensor values under which a captured graph is valid for a call."""
