"""Results for people: a view says what is shown, as blocks, and a terminal or a notebook draws it; pages; figures."""
