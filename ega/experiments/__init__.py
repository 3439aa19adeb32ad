"""Tools that reproduce the experiments of the report and compare methods. The library never imports them."""
