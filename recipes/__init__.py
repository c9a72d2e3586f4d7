"""The recipes that ship with mprun, installed as `mprun.recipes`: model + data + loss."""
