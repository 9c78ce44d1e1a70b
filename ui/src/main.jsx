// The page: who looks, and which view of the service the address names.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { post, useVisitor } from "./api.js";
import { Events } from "./events.jsx";
import { Overview } from "./overview.jsx";
import { Placement } from "./placement.jsx";
import { Playground } from "./playground.jsx";
import { SessionView } from "./session.jsx";
import { Usage } from "./usage.jsx";
import "./style.css";

/** The parts of the address behind `#/`; none while a key is there. */
function useRoute() {
  const parts = () => (location.hash.startsWith("#/") ? location.hash.slice(2).split("/").filter(Boolean) : []);
  const [route, setRoute] = useState(parts);
  useEffect(() => {
    const follow = () => setRoute(parts());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

function Page() {
  const [visitor, enter] = useVisitor();
  const [view, ...args] = useRoute();
  if (visitor === undefined) return null;
  if (visitor === null) return <Entry enter={enter} />;
  return (
    <>
      <header>
        <a class="brand" href="#/">
          Parrot
        </a>
        <nav aria-label="Views">
          <a href="#/" aria-current={view === undefined ? "page" : undefined}>
            Runs
          </a>
          {["Placement", "Tenants", "Events", "Playground"].map((name) => (
            <a
              key={name}
              href={`#/${name.toLowerCase()}`}
              aria-current={view === name.toLowerCase() ? "page" : undefined}
            >
              {name}
            </a>
          ))}
        </nav>
        <span class="visitor">
          {visitor.tenant === null ? "Operator" : `Tenant ${visitor.tenant}`}
          <button class="quiet" onClick={() => post("leave").then(() => enter(null))}>
            Sign out
          </button>
        </span>
      </header>
      <main>
        {view === undefined ? (
          <Overview isOperator={visitor.tenant === null} />
        ) : view === "run" || view === "session" ? (
          <SessionView key={args[0]} id={args[0]} shown={args[1]} />
        ) : view === "placement" ? (
          <Placement />
        ) : view === "tenants" ? (
          <Usage />
        ) : view === "events" ? (
          <Events />
        ) : view === "playground" ? (
          <Playground />
        ) : (
          <NoSuchPage />
        )}
      </main>
    </>
  );
}

const NoSuchPage = () => (
  <section>
    <h1>There is no such page</h1>
    <p>
      <a href="#/">All runs</a>
    </p>
  </section>
);

function Entry({ enter }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState("");
  const submit = (event) => {
    event.preventDefault();
    post("enter", { key: key.trim() }).then(enter, (failure) => setError(failure.message));
  };
  return (
    <main class="entry">
      <h1>Parrot</h1>
      <form onSubmit={submit}>
        <label for="key">Page key or API key</label>
        <input
          id="key"
          type="password"
          autocomplete="current-password"
          value={key}
          onInput={(event) => setKey(event.target.value)}
        />
        <button>Sign in</button>
        <p role="alert">{error}</p>
      </form>
      <p class="hint">
        Run <code>parrot page</code> on the server's machine to get an address with the key.
      </p>
    </main>
  );
}

render(<Page />, document.body);
