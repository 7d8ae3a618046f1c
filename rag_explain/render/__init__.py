"""Views of an Explanation: terminal, HTML, notebook, plots."""
