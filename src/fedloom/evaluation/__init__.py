"""How good it is: distances, scores and rates on arrays, each named by exactly what was computed."""
