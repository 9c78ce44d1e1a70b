"""What ServeCore tells of its work: metrics, costs and traces."""
