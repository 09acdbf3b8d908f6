"""How a model is spread over ranks: the mesh, the layers, the collectives."""
