"""What is learned: networks, likelihoods, priors and the models made of them."""
