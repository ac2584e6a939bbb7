"""Effects of forward besides its results: made part of the graph, or refused."""
