"""From the records of a run to numbers, a JSON file, a terminal table and an HTML page."""
