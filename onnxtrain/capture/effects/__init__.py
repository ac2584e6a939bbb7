"""Make effects of forward besides its results part of the graph, or refuse them."""
