// What has happened to engines, calls and sessions, the last first.
import { useFeed } from "./api.js";
import { Age, Notice } from "./format.jsx";

const SERIOUS = new Set(["engine lost", "call retried"]);

export function Events() {
  const feed = useFeed("events");
  const events = [...feed.rows].sort(([a], [b]) => b.slice(6) - a.slice(6));
  return (
    <>
      <Notice feed={feed} />
      <section>
        <h2>Events</h2>
        {events.length ? <EventTable events={events} /> : <p class="hint">Nothing has happened yet.</p>}
      </section>
    </>
  );
}

function EventTable({ events }) {
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Events">
      <table>
        <thead>
          <tr>
            <th>Event</th>
            <th>Engine</th>
            <th>Session</th>
            <th>What</th>
            <th class="number">Age</th>
          </tr>
        </thead>
        <tbody>
          {events.map(([key, event]) => (
            <tr key={key}>
              <td>
                <span class={`state ${SERIOUS.has(event.kind) ? "failed" : ""}`}>{event.kind}</span>
              </td>
              <td>{event.engine}</td>
              <td>{event.session !== null && <SessionLink event={event} />}</td>
              <td class="words">{event.text}</td>
              <td class="number">
                <Age since={event.at} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function SessionLink({ event: { session, has_view, var: output } }) {
  if (!has_view) return session;
  return <a href={`#/run/${session}${output && `/${output}`}`}>{session}</a>;
}
