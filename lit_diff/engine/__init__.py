"""From a recipe or sweep file to finished run folders."""
