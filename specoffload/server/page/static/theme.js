// Before the first paint, so that a dark page does not flash white. Not a module: those wait.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("specoffload.theme");
  } catch {
    // Storage is switched off: the system's theme it is.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
