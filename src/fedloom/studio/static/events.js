// The stream of changes. A tab that nobody sees does not listen: a browser has few connections for each server.

export function listen(keys, heard) {
  let stream = null;
  const address = `/events?${keys.map((key) => `run=${key}`).join("&")}`;
  const turn = () => {
    if (document.hidden && stream) {
      stream.close();
      stream = null;
    } else if (!document.hidden && !stream) {
      stream = new EventSource(address);
      stream.addEventListener("run", (event) => heard(JSON.parse(event.data), false));
      stream.addEventListener("gone", (event) => heard(JSON.parse(event.data), true));
    }
  };
  document.addEventListener("visibilitychange", turn);
  addEventListener("pagehide", () => { if (stream) stream.close(); });
  turn();
}

// For those who cannot see it: a run that was shown as running and has ended says so once.
export function announce(run, before) {
  if (before === "running" && run.state !== "running") {
    document.getElementById("news").textContent = `${run.name}: ${run.state}`;
  }
}
