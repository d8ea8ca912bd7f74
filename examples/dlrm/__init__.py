"""Recommendation: 26 tables of embedding bags beside two small dense networks."""
