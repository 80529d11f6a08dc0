"""The paper's graph network, in its exact fast form."""
