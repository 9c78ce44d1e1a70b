"""ServeCore's metrics, costs and traces."""
