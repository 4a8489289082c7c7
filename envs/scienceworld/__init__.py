"""ScienceWorld (Wang et al., 2022) behind the `envs.protocol.Environment` interface."""
