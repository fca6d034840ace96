//! Expert balancing against a recorded PyTorch run (three routers, four experts and the skip class, eight steps).

use serde_json::Value;
use zaya::optim::balance::{BalanceConfig, Balancer, Rule};

fn rows<T>(value: &Value, one: impl Fn(&Value) -> T) -> Vec<Vec<T>> {
    value.as_array().unwrap().iter().map(|row| row.as_array().unwrap().iter().map(&one).collect()).collect()
}

fn biases(value: &Value) -> Vec<Vec<f32>> {
    rows(value, |x| x.as_f64().unwrap() as f32)
}

#[test]
fn adamw_balancing_reproduces_the_recorded_biases() {
    let text = include_str!("../fixtures/balance.json");
    let run: Value = serde_json::from_str(text).unwrap();
    let rule = Rule::AdamW {
        lr: run["lr"].as_f64().unwrap(),
        beta1: run["betas"][0].as_f64().unwrap(),
        beta2: run["betas"][1].as_f64().unwrap(),
        eps: run["eps"].as_f64().unwrap(),
    };
    assert_eq!(rule, Rule::default());
    let mut now = biases(&run["start"]);
    let mut balancer = Balancer::new(BalanceConfig { rule, ..BalanceConfig::default() }, &now);
    let steps = run["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 8);
    let mut worst = 0.0f32;
    for (i, step) in steps.iter().enumerate() {
        // Halfway, the state goes through the vectors that a checkpoint holds.
        if i == 4 {
            let mut other = Balancer::new(*balancer.config(), &now);
            other.set_updates(balancer.updates());
            for block in 0..now.len() {
                for slot in 0..rule.slots().len() {
                    other.slot_mut(block, slot).copy_from_slice(balancer.slot(block, slot));
                }
            }
            assert_eq!(other, balancer);
            balancer = other;
        }
        balancer.update(&mut now, &rows(&step["counts"], |x| x.as_u64().unwrap())).unwrap();
        for (got, want) in now.iter().flatten().zip(biases(&step["biases"]).iter().flatten()) {
            worst = worst.max((got - want).abs());
        }
        assert!(now.iter().all(|b| b[4] == -1.0), "the skip class moved");
    }
    assert!(worst <= 1e-6, "biases differ by {worst}");
    println!("largest difference {worst}");
}
