package plan

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
)

// runnersUp limits the strategies that the text shows besides the chosen one and the slowest; --json has all.
const runnersUp = 6

// write prints the choice, the runners-up and the slowest.
func (c *Chosen) write(b *strings.Builder) {
	fmt.Fprintf(b, "\nchoice      by the costs of this machine: attention takes %s of a step\n", readable.Seconds(c.Seconds))
	first := c.Strategies[0]
	fmt.Fprintf(b, "            %s: %s of a micro batch, all layers\n", first.Strategy, readable.Seconds(first.Seconds))
	for j, t := range c.Strategies[1:] {
		if last := j == len(c.Strategies)-2; j < runnersUp || last {
			more := 100 * (t.Seconds/first.Seconds - 1)
			fmt.Fprintf(b, "              %-44s %10s  %+.1f%%\n", t.Strategy, readable.Seconds(t.Seconds), more)
		} else if j == runnersUp {
			fmt.Fprintf(b, "              %d more\n", len(c.Strategies)-runnersUp-2)
		}
	}
	if len(c.Groups) > 1 {
		var list []string
		for _, g := range c.Groups {
			text := fmt.Sprintf("%d x %d ranks %s", g.Data, g.Context, readable.Seconds(g.Seconds))
			if g.TooLarge {
				text += " (does not fit the memory)"
			}
			list = append(list, text)
		}
		fmt.Fprintf(b, "            data x context, attention of a step: %s\n", strings.Join(list, "; "))
	}
}
