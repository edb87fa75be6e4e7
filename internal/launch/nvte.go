package launch

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Variables of TransformerEngine that users of context parallelism have in their scripts.
// They mean here what they mean there: integers, of which any but 0 is true, and every product
// of the last two but 0 and 1 is the most that is said.
const (
	envFlashAttn  = "NVTE_FLASH_ATTN"
	envFusedAttn  = "NVTE_FUSED_ATTN"
	envDebug      = "NVTE_DEBUG"
	envDebugLevel = "NVTE_DEBUG_LEVEL"
)

// AttentionEnv is what the environment says about attention's backends.
type AttentionEnv struct {
	NoFlash, NoFused bool
	Debug            int // NVTE_DEBUG times NVTE_DEBUG_LEVEL: 0, 1 or 2
}

var nvteVariables = []struct {
	name, meaning string
	set           func(e *AttentionEnv, n int)
}{
	{envFlashAttn, "0: attention.backend flash is not chosen; 1 is the default",
		func(e *AttentionEnv, n int) { e.NoFlash = n == 0 }},
	{envFusedAttn, "0: attention.backend fused (cuDNN) is not chosen; 1 is the default",
		func(e *AttentionEnv, n int) { e.NoFused = n == 0 }},
	{envDebug, "1: NVTE_DEBUG_LEVEL counts", func(e *AttentionEnv, n int) { e.Debug = n }},
	{envDebugLevel, "with NVTE_DEBUG=1: at least that much is said about the choice of a backend, as attention.debug " +
		"0, 1 or 2",
		func(e *AttentionEnv, n int) {
			if e.Debug *= n; e.Debug != 0 && e.Debug != 1 {
				e.Debug = 2
			}
		}},
}

// Attention reads the environment's part in the choice of a backend. The error names every
// variable whose value means nothing.
func Attention() (AttentionEnv, error) { return attentionEnv(os.LookupEnv) }

func attentionEnv(lookup func(string) (string, bool)) (AttentionEnv, error) {
	var e AttentionEnv
	var faults []error
	level := false
	for _, v := range nvteVariables {
		text, ok := lookup(v.name)
		if !ok {
			continue
		}
		level = level || v.name == envDebugLevel
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			faults = append(faults, fmt.Errorf("environment: %s=%.60q: want an integer such as 0 or 1, or unset %s",
				v.name, text, v.name))
			continue
		}
		v.set(&e, int(n))
	}
	if !level {
		e.Debug = 0 // the level's default is 0, as in TransformerEngine
	}
	return e, errors.Join(faults...)
}

// Honoured returns one line on the variables that are set and that change what a run does, "" where
// none is.
func Honoured() string {
	var set []string
	for _, v := range Environment() {
		if v.Set && v.changes {
			set = append(set, v.Name+"="+quoteOdd(v.Value))
		}
	}
	if len(set) == 0 {
		return ""
	}
	return "environment: " + strings.Join(set, " ")
}

// quoteOdd keeps a value readable on one line of a terminal.
func quoteOdd(s string) string {
	if q := fmt.Sprintf("%.80q", s); q != `"`+s+`"` || strings.Contains(s, " ") {
		return q
	}
	return s
}
