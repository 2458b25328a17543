"""Who may use the server: keys, and pages in browsers."""
