// The dashboard.

import {fill} from "./dom.js";

export const show = () => {};
export const take = state => fill("dashboard", JSON.stringify(state));
