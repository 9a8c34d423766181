"""The wire ``flower``: fedloom as an ordinary app of Flower's, in a federation that others run.

Nothing here starts or guards a server. Whoever runs the SuperLink can have any code run at a silo, by another app;
docs/how-to/flower.md says what follows from that.
"""
