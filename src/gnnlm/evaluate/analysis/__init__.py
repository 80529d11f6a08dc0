"""The paper's analysis, for any run: each part measures one thing and shows it as tables and figures."""
