"""The conditions under which a captured graph is right for a call."""
