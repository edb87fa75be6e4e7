package hf

import "encoding/json"

// Balances reports whether transformers has the loss of balance for a family.
func (f *Family) Balances() bool {
	return f.Experts != nil && !f.Experts.Router.Sigmoid && !f.Experts.Apart
}

// BalanceCoef returns the factor of the loss of balance; 0: off.
func (c *Config) BalanceCoef() float64 {
	if !c.OutputRouterLogits {
		return 0
	}
	if c.RouterAuxLossCoef > 0 {
		return c.RouterAuxLossCoef
	}
	coef := 0.001
	_ = json.Unmarshal(c.Unused[coefKey], &coef) // checkBalance has checked it
	return coef
}

func (c *Config) checkBalance(f *faults) {
	var coef *float64
	switch raw := c.Unused[coefKey]; {
	case !c.OutputRouterLogits && c.RouterAuxLossCoef > 0:
		f.add(coefKey, "%v has no effect without %s; set that to true, or remove the key", c.RouterAuxLossCoef, logitsKey)
	case !c.OutputRouterLogits || c.RouterAuxLossCoef > 0 || raw == nil:
	case json.Unmarshal(raw, &coef) != nil || coef != nil && !(*coef >= 0):
		f.add(logitsKey, "%s of config.json is %.64s, not a number from 0; set it in train.yaml", coefKey, raw)
	}
}
