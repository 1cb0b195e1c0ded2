"""The first look at a new cluster: facts, the network's speed, and the product's own proof on this hardware."""
