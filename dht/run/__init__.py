"""What a run is: manifest, settings, admission, join link."""
