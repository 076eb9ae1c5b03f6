"""Drawing reports, with matplotlib: `page.html` and `picture.picture`."""
