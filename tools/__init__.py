"""Development commands of the repository; the installed packages do not use them."""
