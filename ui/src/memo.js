// A component that is drawn again only if one of its properties is another value.
import { Component, h } from "preact";

export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const before = this.props;
      return Object.keys({ ...before, ...next }).some((name) => before[name] !== next[name]);
    }

    render() {
      return h(draw, this.props);
    }
  };
}
