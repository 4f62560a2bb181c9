"""Experts: neighbours, trees, products and simple rules beside the network, weighted by their recent errors."""
