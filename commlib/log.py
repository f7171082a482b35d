"""The one logger of commlib."""

import logging


class Log:
    """The logger named ``commlib``; silent unless the program configures it."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("commlib")
        self._said: set[str] = set()

    def info(self, text: str, *values: object) -> None:
        """Log ``text`` at INFO."""
        self._logger.info(text, *values)

    def once(self, text: str, *values: object) -> None:
        """Log ``text`` at INFO, once a process."""
        if text not in self._said:
            self._said.add(text)
            self._logger.info(text, *values)

    def warning(self, text: str, *values: object) -> None:
        """Log ``text`` at WARNING; without a configuration Python prints it on stderr."""
        self._logger.warning(text, *values)

    def warning_once(self, text: str, *values: object) -> None:
        """Log ``text`` at WARNING, once per process."""
        if text not in self._said:
            self._said.add(text)
            self.warning(text, *values)


log = Log()
