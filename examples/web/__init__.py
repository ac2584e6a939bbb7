"""A page that trains in the browser tab: it learns the digits that a person draws."""
