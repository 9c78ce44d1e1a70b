export const State = ({ state }) => <span class={`state ${state}`}>{state}</span>;
